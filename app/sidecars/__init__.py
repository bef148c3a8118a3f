"""Engines that know nothing of OpenEngineAdmin, administered from a process beside them."""
