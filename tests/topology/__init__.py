"""A deployment as plain processes, driven end to end: `python -m tests.topology`."""
