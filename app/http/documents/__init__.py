"""What is answered: one model per shape, filled from the domain by an explicit list of fields.

A field that is not named here is never shown, whatever the value it comes from may hold.
"""
