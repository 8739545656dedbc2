"""The app's SQL, by name. Parameters are psycopg's named ones.

Invariant: `next_offset` moves only in the statement that stores the chunks, under the stream's row lock, so
offsets are gapless and become visible in commit order; and no statement here fails where refusing would do,
so that a refused append leaves the caller's transaction usable.
"""

from __future__ import annotations

APPEND = """
WITH taken AS (
    UPDATE pgstreams_stream AS s
    SET next_offset = s.next_offset + %(count)s,
        appended_at = CASE WHEN %(count)s > 0 THEN statement_timestamp() ELSE s.appended_at END,
        state = CASE WHEN %(close)s THEN 'completed' ELSE s.state END,
        closed_at = CASE WHEN %(close)s THEN statement_timestamp() END
    WHERE s.id = %(stream_id)s
      AND s.state = 'open'
      AND (%(expected_offset)s::bigint IS NULL OR s.next_offset = %(expected_offset)s::bigint)
      AND NOT EXISTS (
          SELECT FROM pgstreams_chunk AS c
          WHERE c.stream_id = %(stream_id)s AND c."offset" >= s.next_offset
      )
    RETURNING s.next_offset, s.first_offset, s.state, s.reason, s.appended_at, s.closed_at
), stored AS (
    INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
    SELECT %(stream_id)s, taken.next_offset - %(count)s + data.place - 1, data.payload, taken.appended_at
    FROM taken, unnest(%(payloads)s::bytea[]) WITH ORDINALITY AS data (payload, place)
)
SELECT * FROM taken
"""
"""Store payloads at the tail. No row: closed, missing, elsewhere than expected, or a stray row in the way."""

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
SELECT page.place, page.stream_id, page.epoch, page.content_type, page.state, page.reason,
       page.next_offset, page.first_offset, page."offset",
       CASE WHEN page.bytes_before < %(max_bytes)s THEN page.payload END,
       page.created_at
FROM (
    SELECT want.place, s.id AS stream_id, s.epoch, s.content_type, s.state, s.reason,
           s.next_offset, s.first_offset, c."offset", c.payload, c.created_at,
           row_number() OVER (PARTITION BY want.place ORDER BY c."offset") AS nth,
           sum(octet_length(c.payload)) OVER (ORDER BY want.place, c."offset")
               - octet_length(c.payload) AS bytes_before
    FROM unnest(%(stream_ids)s::bigint[], %(positions)s::bigint[])
         WITH ORDINALITY AS want (stream_id, position, place)
    LEFT JOIN pgstreams_stream AS s ON s.id = want.stream_id
    LEFT JOIN LATERAL (
        SELECT chunk."offset", chunk.payload, chunk.created_at
        FROM pgstreams_chunk AS chunk
        WHERE chunk.stream_id = want.stream_id
          AND chunk."offset" >= want.position
          AND chunk."offset" < least(
              greatest(want.position, s.first_offset), 9223372036854775807 - %(max_chunks)s
          ) + %(max_chunks)s
        ORDER BY chunk."offset"
        LIMIT %(max_chunks)s
    ) AS c ON true
) AS page
WHERE page.bytes_before < %(max_bytes)s OR page.nth = 1
ORDER BY page.place, page."offset"
"""
"""One page of each of several streams, each with its stream's row: one statement, hence one snapshot.

Every wanted stream has a row at least: without `stream_id` when it does not exist, without `offset` when
nothing is stored at or after the position, without payload when the bytes were used up before it.
Offsets are gapless, so the range holds a page; it is there for the planner, which on a table without
statistics would sort the whole rest of the stream for each page.
"""

NOTIFY = "SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload"
"""For `database.execute`, as is the next: its parameters are libpq's."""

COUNT_SESSIONS = """
SELECT count(*) FROM pg_stat_activity WHERE application_name = $1
"""
