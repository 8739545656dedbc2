"""The app's SQL, by name. Parameters are psycopg's named ones.

Invariant: `next_offset` moves only with the chunks that it counts, under the stream's row lock, so
offsets are gapless and become visible in commit order; and no statement here fails where refusing would do,
so that a refused append leaves the caller's transaction usable.
"""

from __future__ import annotations

APPEND = """
SELECT * FROM pgstreams_append_many(
    %(stream_id)s::bigint, %(payloads)s::bytea[], %(expected_offset)s::bigint, %(close)s
)
"""
"""Store payloads at the tail, and end the stream or not (migration 0005). The counters are all null when the
stream is closed, missing, elsewhere than expected, or a stray row is in the way."""

COUNTERS = """
SELECT next_offset, first_offset, state, reason, appended_at, closed_at
FROM pgstreams_stream
WHERE id = %(stream_id)s
"""

STEP_OVER_STRAY_CHUNKS = """
UPDATE pgstreams_stream
SET next_offset = greatest(
    next_offset,
    (SELECT max("offset") + 1 FROM pgstreams_chunk WHERE stream_id = %(stream_id)s)
)
WHERE id = %(stream_id)s
"""
"""Raise the counter past chunks that something else stored (a fixture, a raw INSERT)."""

CLOSE = """
UPDATE pgstreams_stream
SET state = %(state)s, reason = %(reason)s, closed_at = statement_timestamp()
WHERE id = %(stream_id)s AND state = 'open'
RETURNING next_offset, first_offset, state, reason, appended_at, closed_at
"""

GET_LOCK_TIMEOUT = "SELECT current_setting('lock_timeout')"

SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %(lock_timeout)s, true)"
"""For the rest of the transaction."""

LOCK_STREAM = "SELECT FROM pgstreams_stream WHERE id = %(stream_id)s FOR UPDATE"

DELETE_CHUNKS = "DELETE FROM pgstreams_chunk WHERE stream_id = %(stream_id)s"

PAGES = """
SELECT * FROM pgstreams_pages(
    %(stream_ids)s::bigint[], %(positions)s::bigint[],
    %(max_chunks)s::bigint, %(max_bytes)s::bigint, %(max_page_bytes)s::bigint
)
"""
"""One page of each of several streams, each with its stream's row: one statement, hence one snapshot
(`migrations._functions` tells what its columns are)."""

PROBE = "SELECT pg_notify(%(channel)s, %(payload)s)"

NOTIFY = "SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload"
"""For `database.execute`, as are the next: its parameters are libpq's."""

FREE_NOTIFICATION_QUEUE = "SELECT pg_notification_queue_usage()"
"""It drops what every listener has had before it counts. Postgres does so otherwise only when it adds to the
queue, which it cannot once that is full: it would stay full for ever."""

COUNT_SESSIONS = """
SELECT count(*) FROM pg_stat_activity WHERE application_name = $1
"""

# The writer's, for `database.execute` --------------------------------------------------------------

STORE = "SELECT bases, stored_at, refusals FROM pgstreams_store($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
"""Store a batch for many streams, as migration 0004 describes. It fails with `WRITER_IS_ELSEWHERE` unless the
writer's row is at the batch before: somebody has settled this one already."""

WRITER_IS_ELSEWHERE = "PGS01"
"""The error code."""

STEP_OVER = """
UPDATE pgstreams_stream
SET next_offset = greatest(
    next_offset,
    (SELECT max("offset") + 1 FROM pgstreams_chunk WHERE stream_id = $1::bigint)
)
WHERE id = (SELECT id FROM pgstreams_stream WHERE id = $1::bigint FOR NO KEY UPDATE SKIP LOCKED)
RETURNING id
"""

REGISTER_WRITER = "INSERT INTO pgstreams_writer (id) VALUES ($1::uuid) ON CONFLICT DO NOTHING"

SETTLE = """
UPDATE pgstreams_writer
SET seq = seq + 1
WHERE id = $1::uuid
RETURNING seq, batch, extract(epoch FROM used_at), streams, bases
"""
"""Wait for a batch that is being committed, keep one that is not there yet from committing, and tell the last
that did."""

FORGET_WRITER = "DELETE FROM pgstreams_writer WHERE id = $1::uuid"

FORGET_OLD_WRITERS = """
DELETE FROM pgstreams_writer
WHERE id IN (
    SELECT id FROM pgstreams_writer
    WHERE used_at < statement_timestamp() - interval '1 day'
    FOR UPDATE SKIP LOCKED
)
"""

GET_ISOLATION = "SELECT current_setting('transaction_isolation')"

# The relay's, for `database.execute` ---------------------------------------------------------------

SNAPSHOT = "SELECT pg_current_snapshot()"
"""Which transactions are seen. While it stays the same, nothing has committed in the whole cluster."""

HIGHEST_STREAM = "SELECT max(id) FROM pgstreams_stream"

_WATCHED = """
FROM (
    SELECT id, next_offset AS position FROM pgstreams_stream WHERE state = 'open'
    UNION ALL
    SELECT id, ~next_offset FROM pgstreams_stream WHERE state <> 'open' AND id > $1::bigint
) AS watched
"""
_BLOCK_AND_DIGEST = "SELECT id >> 8 AS block, bit_xor(hashint8extended(id, position))"

WATCHED = f"""
{_BLOCK_AND_DIGEST},
    array_agg(id) FILTER (WHERE id >> 8 = ANY ($2::bigint[])),
    array_agg(position) FILTER (WHERE id >> 8 = ANY ($2::bigint[]))
{_WATCHED}
GROUP BY block
"""
"""A digest of each block of 256 ids that has watched streams (those open, and those ended above the id $1),
and for the blocks $2 the ids and positions, as of the same moment."""

WATCHED_BLOCKS = f"""
{_BLOCK_AND_DIGEST}, array_agg(id), array_agg(position)
{_WATCHED}
WHERE id BETWEEN $3::bigint << 8 AND ($4::bigint << 8) + 255 AND id >> 8 = ANY ($2::bigint[])
GROUP BY block
"""
"""The same for the blocks $2 only, of which $3 is the first and $4 the last."""
