"""Over the system server of a Dynamo worker."""
