import os

from .right import run as right

files = []


def run(*inputs):
    results = right(*inputs)
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return results
