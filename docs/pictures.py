"""``python docs/pictures.py``: draws docs/zero/who-keeps-what.svg from the placement table itself."""

from __future__ import annotations

from pathlib import Path

from deepspeed.zero.placement import Home, Placement

RANKS = 4
WIDTHS = {"parameters": 2, "gradients": 4, "masters": 4, "optimizer state": 8}  # bytes per parameter: bf16 and Adam
COLOURS = {"parameters": "#4c78a8", "gradients": "#f58518", "masters": "#54a24b", "optimizer state": "#b279a2"}
PLACES = {Home.DEVICE: "", Home.HOST: " (host)", Home.FILE: " (files)"}
SCALE, ROW, LEFT = 36, 46, 190  # pixels per byte, per row, and before the bars

HOST, FILE = Home.HOST, Home.FILE
PLACEMENTS = [
    *((f"stage {stage}", Placement.of_stage(stage)) for stage in range(4)),
    ("stage 3, optimizer on host", Placement.of_stage(3, master_home=HOST)),
    ("stage 3, all on host", Placement.of_stage(3, master_home=HOST, param_home=HOST)),
    ("stage 3, all on NVMe", Placement.of_stage(3, master_home=FILE, param_home=FILE)),
]


def kept(placement: Placement) -> list[tuple[str, bool, Home]]:
    """``(state, is it only a slice, where)`` for each model state."""
    gradient_home = Home.DEVICE if placement.master_home is Home.DEVICE else Home.HOST
    return [
        ("parameters", placement.shard_params, placement.param_home),
        ("gradients", placement.shard_gradients or placement.shard_master, gradient_home),
        ("masters", placement.shard_master, placement.master_home),
        ("optimizer state", placement.shard_master, placement.master_home),
    ]


def draw() -> str:
    """The picture: a row per placement, a bar per model state, full height only for what is whole."""
    width, height = LEFT + sum(WIDTHS.values()) * SCALE + 20, (len(PLACEMENTS) + 1) * ROW + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for number, (name, placement) in enumerate(PLACEMENTS):
        top = number * ROW + 14
        parts.append(f'<text x="8" y="{top + 21}" fill="#222">{name}</text>')
        left = LEFT
        for state, is_slice, home in kept(placement):
            full = WIDTHS[state] * SCALE - 4
            wide = full / RANKS if is_slice else full
            opacity = {Home.DEVICE: 1.0, Home.HOST: 0.55, Home.FILE: 0.25}[home]
            parts.append(
                f'<rect x="{left}" y="{top}" width="{full}" height="32" fill="none" stroke="#ccc"/>'
                f'<rect x="{left}" y="{top}" width="{wide:g}" height="32" fill="{COLOURS[state]}" '
                f'fill-opacity="{opacity}"><title>{name}: {state} {"1/" + str(RANKS) if is_slice else "whole"}'
                f"{PLACES[home]}</title></rect>"
            )
            left += full + 4
    top, left = len(PLACEMENTS) * ROW + 20, LEFT
    for state, size in WIDTHS.items():
        parts.append(f'<text x="{left}" y="{top + 8}" fill="{COLOURS[state]}">{state}</text>')
        parts.append(f'<text x="{left}" y="{top + 24}" fill="#222">{size} bytes</text>')
        left += size * SCALE
    parts.append(
        f'<text x="8" y="{top + 8}" fill="#222">bytes per parameter</text>'
        f'<text x="8" y="{top + 26}" fill="#555">full colour: device,</text>'
        f'<text x="8" y="{top + 42}" fill="#555">paler: host, palest: files</text></svg>'
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    target = Path(__file__).parent / "zero" / "who-keeps-what.svg"
    target.write_text(draw(), encoding="utf-8")
