"""gdn.serving.sglang under its old name, for one release."""

from gdn.serving.sglang import *  # noqa: F403

if __name__ == "__main__":
    from runpy import run_module

    run_module("gdn.serving.sglang", run_name="__main__")
