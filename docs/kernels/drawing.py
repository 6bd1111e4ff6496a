"""The drawings of this folder: `python docs/kernels/drawing.py` writes each .svg anew. Plain SVG, no packages."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
text { font: 13px sans-serif; fill: #222 } .small { font-size: 11px } .mid { text-anchor: middle }
.memory { fill: #9ecae1 } .compute { fill: #fdae6b } .store { fill: #a1d99b } .line { stroke: #888; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .memory { fill: #31618a } .compute { fill: #a35a1e } .store { fill: #3b7a3b }
}
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, wide: float, high: float, kind: str, words: str = "") -> str:
    label = text(x + wide / 2, y + high / 2 + 4, words, "small mid") if words else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="3" class="{kind}"/>{label}'


def write(name: str, wide: int, high: int, parts: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">'
    (HERE / f"{name}.svg").write_text("\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n")


def decode() -> None:
    """A warp's time with one pass, and with four; the lanes of a row."""
    parts = [text(10, 22, "One pass: a CTA loads, computes, stores; the next wave begins when it has ended")]
    for wave in range(3):
        x = 10 + 235 * wave
        high = 26 if wave < 2 else 15  # the third wave is not full
        parts += [box(x, 34, 120, high, "memory", "1 load S"), box(x + 122, 34, 60, high, "compute", "2-5")]
        parts += [box(x + 184, 34, 45, high, "store", "6 store")]
    parts += [text(10, 92, "Four passes: all loads at the start, the first to registers, the others to shared memory")]
    for number in range(4):
        y, begin = 104 + 24 * number, 132 + 110 * number
        parts += [text(10, y + 15, f"pass {number + 1}", "small"), box(60, y, begin - 62, 20, "memory", "load S")]
        parts += [box(begin, y, 60, 20, "compute", "4-5"), box(begin + 62, y, 45, 20, "store", "store")]
    lanes = "Lanes of a warp, LANES = 16, ROWS = 4: two rows at a time, four of these groups in registers"
    parts += [text(10, 226, lanes)]
    for group in range(4):
        for half in range(2):
            y = 238 + 22 * group
            first = 10 + 352 * half
            parts += [box(first + 22 * lane, y, 20, 18, "memory", str(16 * half + lane)) for lane in range(16)]
    parts += [text(10, 344, "row w: 16 lanes x 8 floats of K = 128", "small"), text(362, 344, "row w + 1", "small")]
    write("decode-v5", 730, 356, parts)


if __name__ == "__main__":
    decode()
