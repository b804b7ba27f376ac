"""Photos: decoding, views, side information, dataset checks and statistics, and generated scenes."""
