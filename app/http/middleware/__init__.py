"""What every request passes, as plain ASGI so that streams flow through untouched."""
