"""The demonstration: a development issuer, the reference engine and the gateway as processes of
one parent, which ends them all together."""
