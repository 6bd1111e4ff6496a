"""The process wall: what lies behind it runs foreign code and may import torch.

A command starts `serve` in a process of its own and sends it a request (`request`); it
answers with messages and records (`messages`). Those modules are the door: a command
imports nothing else from here, but for the tools of `profilers` and the names of
`executor.sandbox`, which load no torch.

`judge` draws inputs, checks and probes; `executor` is the process of the algo's code;
`timing` and `profilers` measure in it.
"""
