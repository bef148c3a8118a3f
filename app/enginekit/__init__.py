"""The server side of OpenEngineAdmin for any engine."""
