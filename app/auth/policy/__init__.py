"""What each caller may do on which engines, by a file: a narrowing of what tokens grant."""
