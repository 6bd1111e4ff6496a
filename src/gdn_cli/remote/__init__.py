"""Modal, and other engines: send a worker's requests to another machine, and bring the
replies back.

    settings.py      configs/modal.toml, the pinned packages, what a GPU's name means
    wire.py          requests and replies as bytes
    container.py     runs there: the same worker as here, in an empty folder, with its
                     own time limit
    build_cache.py   compiled code, kept for the next container
    engines.py       what carries work, and `--engine`: configs/engines.toml
    through.py       one that is a command, such as ssh: stdin and stdout are the link
    slurm.py         one that is a cluster, by submitit: an array, a folder for each run
    host.py          the far side of both: who it is, the machine's locks, the link's end
    engine.py        jobs -> calls -> outcomes: what `gdn modal run` and `bench` plug in
    calls.py         sends calls, follows them, and says how each ended
    work.py          what one container gets, how long it may take, what that will likely cost
    replies.py       whether a reply is what was asked for, of the GPU that was asked for
    resume.py        an unfinished run: which parts of its file stay
    profiles.py      profiles and tunings of all of them
    modal_client.py  Modal itself: image, deployed function, calls, volumes
    modal_errors.py  its errors as ours (only these two import modal)
    setup.py         `gdn modal setup`; where on its volume a data set is

The container's side does not need Modal: `container.serve(bytes) -> bytes` would work
with any other carrier.
"""
