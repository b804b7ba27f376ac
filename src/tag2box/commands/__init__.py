"""What the command line does, as Python calls: each command is one function here."""
