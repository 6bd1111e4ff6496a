"""An algo's code in a process of its own, apart from the one that judges it.

The worker draws the inputs, computes what is right and gives the verdict; it never runs an algo. Beside it lives a
runner: it builds the algo, calls and times it. Inputs go to the runner and outputs come back through memory that both
map, everything else as JSON over a socket.

| module     | what it is                                                       | who imports it |
|------------|------------------------------------------------------------------|----------------|
| channel    | frames of JSON over a socket, of bounded size                    | both           |
| shared     | memory that both map, and tensors in it                          | both           |
| calls      | what can be done with a kernel in its own process                | both           |
| measuring  | a tier's part of a record: the time, doubts, the GPU's state     | both           |
| runner     | the process: reads a command, does it, answers                   | nobody         |
| survey     | what one call puts on the GPU                                    | the runner     |
| process    | starts a runner                                                  | the worker     |
| client     | the worker's side of a runner: asks it                           | the worker     |
| sandbox    | bubblewrap's command line around a runner                        | the worker     |
"""
