"""The drawings of this folder: `python docs/kernels/drawing.py` writes each .svg. Plain
SVG, no packages.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
text { font: 13px sans-serif; fill: #222 } .small { font-size: 11px } .mid { text-anchor: middle }
.memory { fill: #9ecae1 } .compute { fill: #fdae6b } .store { fill: #a1d99b }
.line { stroke: #888; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .memory { fill: #31618a } .compute { fill: #a35a1e } .store { fill: #3b7a3b }
}
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(
    x: float, y: float, wide: float, high: float, kind: str, words: str = ""
) -> str:
    label = text(x + wide / 2, y + high / 2 + 4, words, "small mid") if words else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="3"'
        f' class="{kind}"/>{label}'
    )


def write(name: str, wide: int, high: int, parts: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">'
    (HERE / f"{name}.svg").write_text(
        "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"
    )


def decode() -> None:
    """A warp's time with one pass, and with four; the lanes of a row."""
    parts = [
        text(
            10,
            22,
            "One pass: a CTA loads, computes, stores; the next wave begins when it has ended",
        )
    ]
    for wave in range(3):
        x = 10 + 235 * wave
        high = 26 if wave < 2 else 15  # the third wave is not full
        parts += [
            box(x, 34, 120, high, "memory", "1 load S"),
            box(x + 122, 34, 60, high, "compute", "2-5"),
        ]
        parts += [box(x + 184, 34, 45, high, "store", "6 store")]
    parts += [
        text(
            10,
            92,
            "Four passes: all loads at the start, the first to registers, the others to shared"
            " memory",
        )
    ]
    for number in range(4):
        y, begin = 104 + 24 * number, 132 + 110 * number
        parts += [
            text(10, y + 15, f"pass {number + 1}", "small"),
            box(60, y, begin - 62, 20, "memory", "load S"),
        ]
        parts += [
            box(begin, y, 60, 20, "compute", "4-5"),
            box(begin + 62, y, 45, 20, "store", "store"),
        ]
    lanes = (
        "Lanes of a warp, LANES = 16, ROWS = 4: two rows at a time, four of these groups in"
        " registers"
    )
    parts += [text(10, 226, lanes)]
    for group in range(4):
        for half in range(2):
            y = 238 + 22 * group
            first = 10 + 352 * half
            parts += [
                box(first + 22 * lane, y, 20, 18, "memory", str(16 * half + lane))
                for lane in range(16)
            ]
    parts += [
        text(10, 344, "row w: 16 lanes x 8 floats of K = 128", "small"),
        text(362, 344, "row w + 1", "small"),
    ]
    write("decode-v5", 730, 356, parts)


def arrow(words: str, *points: tuple[float, float], label: tuple[float, float]) -> str:
    """A line through the points, with a head at the last one, and its words at `label`."""
    line = " ".join(f"{x:g},{y:g}" for x, y in points)
    return (
        f'<polyline points="{line}" class="line"'
        f' marker-end="url(#head)"/>{text(*label, words, "small")}'
    )


def prefill_chunk() -> None:
    """A chunk's way through the four roles of a CTA, and a consumer's time in it."""
    head = '<path d="M0 0 8 4 0 8z" fill="#888"/>'
    size = 'viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
    title = "The roles of a CTA with four stages; chunk i and chunk i + 4 share a stage"
    parts = [
        f'<defs><marker id="head" {size}>{head}</marker></defs>',
        text(10, 20, title),
    ]

    # Of chunk i, where a chunk takes 150 and the consumers begin at `origin`: begin,
    # length, y, colour, step and role.
    origin = 430
    roles = [
        (-336, 96, 44, "memory", "6 producer"),
        (-20, 66, 104, "compute", "7 maker of M"),
    ]
    roles += [
        (0, 148, 164, "compute", "8-12 consumers"),
        (166, 36, 224, "store", "13 epilogue"),
    ]
    for begin, wide, y, kind, role in roles:
        parts += [text(10, y + 17, role, "small")]
        for number in range(-4, 5):
            x = origin + 150 * number + begin
            if 94 <= x and x + wide <= 860:
                chunk = (
                    f"i {number:+d}".replace("+", "+ ").replace("-", "- ")
                    if number
                    else "i"
                )
                opacity = 0.5 if number % 4 else 1
                drawn = box(x, y, wide, 26, kind, chunk)
                parts.append(f'<g opacity="{opacity}">{drawn}</g>')
    full, ready, packs, staged, free = (
        origin - 240,
        origin + 46,
        origin + 135,
        origin + 158,
        origin + 202,
    )
    begins = origin - 14
    parts += [
        arrow(
            "full",
            (full, 70),
            (full, 90),
            (begins, 90),
            (begins, 103),
            label=(full + 5, 86),
        )
    ]
    last = origin + 100
    parts += [arrow("packing", (packs, 164), (packs, 131), label=(packs + 5, 152))]
    parts += [
        arrow(
            "m_ready",
            (ready, 130),
            (ready, 147),
            (last, 147),
            (last, 163),
            label=(ready + 6, 143),
        )
    ]
    bend = (staged, 208), (staged + 16, 208)
    parts += [
        arrow(
            "outputs_ready",
            (staged, 190),
            *bend,
            (staged + 16, 223),
            label=(staged - 84, 206),
        )
    ]
    parts += [
        arrow(
            "empty",
            (free, 224),
            (free, 84),
            (free + 68, 84),
            (free + 68, 71),
            label=(free + 6, 81),
        )
    ]

    top = 300
    title = (
        "A consumer warpgroup in chunk i: products run while others' results are packed (not to"
        " scale)"
    )
    parts += [text(10, top - 14, title)]
    parts += [
        text(10, top + 17, "tensor cores", "small"),
        text(10, top + 57, "registers", "small"),
    ]
    products = [
        (0, 134, "8 S K^T"),
        (136, 78, "8 S Q^T"),
        (246, 84, "10 (T - I) R"),
        (332, 76, "10 S Q^T"),
    ]
    products += [(432, 134, "11 D^T K"), (568, 92, "12 M D")]
    parts += [
        box(100 + x, top, wide, 26, "compute", words) for x, wide, words in products
    ]
    work = [
        (14, 66, "store", "12 O, i - 1"),
        (82, 52, "memory", "V, gates"),
        (136, 108, "compute", "9 R"),
    ]
    work += [(246, 84, "compute", "11 e^G_C S"), (332, 98, "compute", "10 D packed")]
    work += [(432, 134, "compute", "12 e^G O"), (568, 92, "compute", "11 S packed")]
    parts += [
        box(100 + x, top + 40, wide, 26, kind, words) for x, wide, kind, words in work
    ]
    parts += [
        f'<g opacity="0.4">{box(764, top, 96, 26, "compute", "8 S K^T, i + 1")}</g>'
    ]
    parts += [arrow("full", (100, top + 86), (100, top + 28), label=(104, top + 84))]
    parts += [
        arrow(
            "outputs_ready of i - 1",
            (178, top + 66),
            (178, top + 92),
            label=(184, top + 90),
        )
    ]
    parts += [arrow("m_ready", (668, top + 86), (668, top + 28), label=(672, top + 84))]
    write("prefill-chunk", 870, top + 102, parts)


def flashcore() -> None:
    """A block of rows, cut over two CTAs of eight warps; a warp's time by each of the
    three kernels.
    """
    parts = [
        text(
            10,
            20,
            "A block of 64 rows x 512 keys: SPLITS = 2 CTAs, each with 4 row groups x 2 key"
            " groups of warps",
        )
    ]
    for key in range(8):  # KEYS keys each; a step has the two key groups of a CTA
        cta, step, group = key // 4, key % 4 // 2, key % 2
        x = 70 + 80 * key + 20 * cta
        if group == 0:
            parts += [text(x + 78, 42, f"CTA {cta}, step {step}", "small mid")]
        for rows in range(4):
            shade = 1 if group == 0 else 0.6
            warp = box(x, 50 + 22 * rows, 78, 20, "compute", f"warp {rows + 4 * group}")
            parts += [f'<g opacity="{shade}">{warp}</g>']
    parts += [
        text(10, 65 + 22 * rows, f"row {16 * rows} on", "small") for rows in range(4)
    ]
    parts += [text(10, 164, "5 merge", "small"), text(10, 191, "6 store", "small")]
    for cta in range(2):
        x = 70 + 340 * cta
        parts += [
            box(
                x,
                148,
                318,
                24,
                "memory",
                f"4 parts (m, l, o) of rows {32 * cta} to {32 * cta + 31}: 2 CTAs x 2 key groups",
            )
        ]
        parts += [
            box(
                x, 175, 318, 24, "store", f"CTA {cta} weighs them, divides by l, writes"
            )
        ]

    parts += [
        text(
            10,
            236,
            "A warp's time (not to scale): 1 load, 2 scores, 3 online softmax, 4 product with V,"
            " 5 merge, 6 store",
        )
    ]
    parts += [
        text(10, 263, "MMA_SYNC", "small"),
        text(10, 309, "AT_ONCE", "small"),
        text(10, 355, "WGMMA_AHEAD", "small"),
    ]
    parts += [
        box(110, 248, 76, 24, "memory", "1 STAGES"),
        box(110, 294, 120, 24, "memory", "1 all tiles"),
    ]
    for step in range(3):
        x = 188 + 134 * step
        names = ((6, "2 S"), (46, "3"), (92, "4 O"))
        parts += [box(x + at, 248, 38, 24, "compute", name) for at, name in names]
        parts += [f'<path d="M{x + 3} 244v32M{x + 88} 244v32" class="line"/>']
    parts += [
        box(232 + 40 * n, 294, 38, 24, "compute", name)
        for n, name in enumerate(("2 S", "3", "4 O") * 2)
    ]
    for x, y in ((588, 248), (472, 294)):
        parts += [
            box(x, y, 38, 24, "memory", "5"),
            box(x + 40, y, 38, 24, "store", "6"),
        ]
    parts += [
        text(672, 263, "| barrier", "small"),
        text(556, 309, "no barriers between steps", "small"),
    ]
    parts += [
        box(110, 340, 38, 50, "memory", "1"),
        text(10, 384, "2, 4; below: 3", "small"),
    ]
    products = (
        (150, "2 S0"),
        (254, "2 S1"),
        (306, "4 O0"),
        (378, "2 S2"),
        (430, "4 O1"),
        (502, "4 O2"),
    )
    parts += [box(x, 340, 50, 24, "compute", words) for x, words in products]
    softmax = ((202, 50, "3 P0"), (306, 70, "3 P1"), (430, 70, "3 P2"))
    parts += [box(x, 366, wide, 24, "compute", words) for x, wide, words in softmax]
    parts += [box(554, 340, 38, 50, "memory", "5"), box(594, 340, 38, 50, "store", "6")]
    write("flashcore", 740, 402, parts)


if __name__ == "__main__":
    decode()
    prefill_chunk()
    flashcore()
