"""An algo's code in its own process, separate from the one that judges it.

The worker draws the inputs, computes the right results and judges. Its runner builds
the algo, calls it and times it. Tensors travel through memory that both processes map,
everything else as JSON over a socket.

`client` is the worker's side, `main` the runner's process, which `process` starts;
`channel`, `shared_memory`, `calls` and `measuring` are used by both.
"""
