"""The verbs of the command line. What they share: exit codes, one line per error, and JSON."""
