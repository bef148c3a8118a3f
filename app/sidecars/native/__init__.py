"""An engine that speaks the core services of `openengine.v1` itself, and has no admin service."""
