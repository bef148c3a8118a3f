"""Engines that are found rather than registered by hand: what a file or a cluster lists, brought
into the register through the same door. See docs/adr/0025."""
