"""Generated from proto/ by scripts/gen-proto. Never edited; see docs/adr/0001."""
