"""An algo's code in a process of its own, apart from the one that judges it.

The worker draws the inputs, computes what is right and gives the verdict. Its runner builds the algo, calls and times
it. Tensors go there and back through memory that both map, everything else as JSON over a socket.

The worker asks by `client`, `main` is the process, which `process` starts; `channel`, `shared_memory`, `calls` and
`measuring` belong to both.
"""
