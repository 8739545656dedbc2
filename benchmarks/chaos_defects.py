"""The defects that `chaos` can put into the running product, to prove that it would notice: `--defect NAME`.

The processes of the product are told by an environment variable, and make the defect with `chaos_defective`.
"""

from __future__ import annotations

VARIABLE = "CHAOS_DEFECT"

DEFECTS: dict[str, str] = {
    "wake-up-dropped": "readers never take the last wake-up of a stream, and do not poll",
    "announced-early": "writers announce before they commit; readers believe each hint once, and do not poll",
    "offset-skipped": "the writer's function leaves one offset out, once in each stream",
    "no-fence": "the writer's function stores a batch also when its writer has given it up",
    "stored-twice": "a writer sends a batch again without looking whether it had been committed",
    "forgotten": "a writer now and then acknowledges a batch that was rolled back",
    "delivered-twice": "a follower now and then is given a chunk again",
}
"""Each, and what it does."""
