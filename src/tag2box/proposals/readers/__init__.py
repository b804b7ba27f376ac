"""Proposals from elsewhere: what other people's files hold, whose image is whose photo, and whether boxes fit."""
