"""The pure core: what an order is, what may follow what, and what an engine has acknowledged.

Standard library only. Nothing here reads a clock, makes an id, waits or touches the outside.
"""
