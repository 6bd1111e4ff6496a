"""Modal: carries a worker's requests to a rented GPU, and the replies back.

    settings.py      configs/modal.toml, the pinned packages, what a GPU's name means
    wire.py          requests and replies as bytes
    container.py     what runs there: the same worker as here, in an empty folder, with an alarm of its own
    build_cache.py   what was compiled there, kept for the next container
    engine.py        jobs -> calls -> outcomes: fan-out, bounds, interrupts; what one campaign needs
    resume.py        a run that was left behind: what of its file can stay, and what is fetched or sent again
    modal_client.py  the only module that imports modal: image, function, session, volumes; its errors in our words
    setup.py         `gdn modal setup`

The container's side needs no Modal: `container.serve(bytes) -> bytes` would do the same behind any other carrier.
"""
