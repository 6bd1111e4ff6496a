"""Modal: carries a worker's requests to a rented GPU, and the replies back.

    settings.py    configs/modal.toml, the pinned packages, what a GPU's name means
    parcel.py      requests and replies as bytes
    container.py   what runs there: the same worker as here, in an empty folder, with an alarm of its own
    caches.py      what was compiled there, kept for the next container
    engine.py      jobs -> calls -> outcomes: fan-out, bounds, interrupts; what one campaign needs
    sent.py        a run that was left behind: what of its file can stay, and what is fetched or sent again
    cloud.py       the only module that imports modal: image, function, session, volumes, and its errors in our words
    stocking.py    `gdn modal setup`

The container's side needs no Modal: `container.serve(bytes) -> bytes` would do the same behind any other carrier.
"""
