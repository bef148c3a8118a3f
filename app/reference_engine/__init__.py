"""A Llama-family decoder in torch that really serves, built to be administered.

The front end (gRPC, asyncio) never imports torch: each rank is a process of its own, so a long
step can not stop the front end from answering, and a rank that dies takes no listener with it.
"""

from app.reference_engine.kernels import choose

choose()
