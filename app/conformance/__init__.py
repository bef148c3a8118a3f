"""A black-box suite for any engine that serves `openengine.v1.OpenEngineAdmin`."""
