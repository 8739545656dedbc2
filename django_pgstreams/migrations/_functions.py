"""The app's functions in the database, as they are now; a migration makes them, or brings them up to date.

Each append makes a new version of its stream's row, and while a snapshot is held elsewhere (by a report, a
dump) none of them goes away. To look a row up by its id then passes all of them, from the oldest on. So the
functions look for it from the other end, where the newest is: by `id >= x AND id <= x ORDER BY id DESC LIMIT
1`, which only an index scan backwards answers, since the planner takes `id = x` for sorted already; the lock
keeps the version that was found the newest, and the next statement goes to it by its place (`ctid`).
"""

from __future__ import annotations

from typing import Any

from django.db import migrations

_PIN = """
DO $$ BEGIN
    EXECUTE format(
        'ALTER FUNCTION <name> SET search_path = pg_catalog, %s, pg_temp',
        (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = 'pgstreams_stream'::regclass)
    );
END $$;
ALTER FUNCTION <name> SET enable_seqscan = off;
ALTER FUNCTION <name> SET enable_bitmapscan = off;
ALTER FUNCTION <name> SET enable_hashjoin = off;
ALTER FUNCTION <name> SET enable_mergejoin = off;
ALTER FUNCTION <name> SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION <name> SET jit = off;
"""


def make(name: str, text: str, drop: Any = migrations.RunSQL.noop) -> migrations.RunSQL:
    """Make a function, or put this text in its place; `drop` is what undoes it.

    It finds the app's tables whatever the caller's search path is, and whatever is in the caller's temporary
    schema; and a session makes its plans once: those that are good for many streams with many versions, also
    when the tables are empty then.
    """
    return migrations.RunSQL(text + _PIN.replace("<name>", name), drop)


# The offset comes from the stream's row, under its lock, so only a row that something else stored can be in
# the way: the counter is raised past it. JSON is cast to json, as jsonb refuses "\u0000"; since json lets
# halves of surrogate pairs pass, they are looked for. Text may hold NUL, which Postgres's own text may not:
# another character takes its place for the check. Once it is stored, a trigger on chunks may have updated the
# stream's row, which is at another place then.
APPEND = r"""
CREATE OR REPLACE FUNCTION pgstreams_append(key text, payload bytea) RETURNS bigint
LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
    taken_id bigint;
    taken_offset bigint;
    place tid;
    is_stored boolean;
    content_type text;
    state text;
    reason text;
    body text;
    parsed json;
BEGIN
    FOR attempt IN 1..3 LOOP
        SELECT s.id, s.next_offset, s.ctid, s.content_type INTO taken_id, taken_offset, place, content_type
        FROM pgstreams_stream AS s
        WHERE s.key >= pgstreams_append.key AND s.key <= pgstreams_append.key AND s.state = 'open'
        ORDER BY s.key DESC LIMIT 1 FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            SELECT s.state, s.reason INTO state, reason
            FROM pgstreams_stream AS s WHERE s.key = pgstreams_append.key;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'stream % does not exist', quote_nullable(key)
                    USING ERRCODE = 'no_data_found',
                          HINT = 'Create it first; until that has committed, others do not see it.';
            ELSIF state <> 'open' THEN
                RAISE EXCEPTION 'stream % is %', quote_literal(key), state
                    USING ERRCODE = 'object_not_in_prerequisite_state',
                          DETAIL = coalesce(nullif(reason, ''), 'No reason was given.'),
                          HINT = 'A stream that has ended takes no more chunks: create another.';
            END IF;
            CONTINUE; -- it was created meanwhile
        END IF;

        IF content_type = 'application/json'
           OR lower(split_part(content_type, ';', 1)) ~ '^(application/json|.*\+json) *$' THEN
            body := convert_from(payload, 'UTF8');
            parsed := body;
            IF strpos(body, '\u') > 0 AND regexp_replace(
                replace(body, '\\', ' '),
                '\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}', '', 'g'
            ) ~ '\\u[dD][89a-fA-F]' THEN
                RAISE EXCEPTION 'the payload for stream % holds half of a surrogate pair', quote_literal(key)
                    USING ERRCODE = 'invalid_text_representation',
                          HINT = 'Escapes from \ud800 to \udfff come in pairs.';
            END IF;
        ELSIF lower(content_type) LIKE 'text/%' THEN
            IF position('\x00'::bytea IN payload) > 0 THEN
                body := replace(regexp_replace(encode(payload, 'hex'), '(..)', '\1 ', 'g'), '00 ', '01 ');
                PERFORM convert(decode(body, 'hex'), 'UTF8', 'UTF8');
            ELSE
                PERFORM convert(payload, 'UTF8', 'UTF8');
            END IF;
        END IF;

        INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
        VALUES (taken_id, taken_offset, pgstreams_append.payload, statement_timestamp())
        ON CONFLICT DO NOTHING;
        is_stored := FOUND;
        LOOP
            UPDATE pgstreams_stream AS s
            SET next_offset = CASE WHEN is_stored THEN taken_offset + 1 ELSE (
                    SELECT max(c."offset") + 1 FROM pgstreams_chunk AS c WHERE c.stream_id = s.id
                ) END,
                appended_at = CASE WHEN is_stored THEN statement_timestamp() ELSE s.appended_at END
            WHERE s.ctid = place;
            EXIT WHEN FOUND;
            SELECT s.ctid INTO STRICT place FROM pgstreams_stream AS s WHERE s.id = taken_id;
        END LOOP;
        IF is_stored THEN
            RETURN taken_offset;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'stream % keeps getting chunks that do not advance its counter', quote_literal(key)
        USING ERRCODE = 'lock_not_available',
              HINT = 'Another program inserts rows into pgstreams_chunk: let it call pgstreams_append.';
END
$function$;
"""

DROP_APPEND = "DROP FUNCTION pgstreams_append(text, bytea)"

# What is refused is left as it was. One payload alone waits for a row in its way that is not committed yet,
# and is refused. Several fail then, and are refused for any row beyond the tail: others may follow them. As
# above, a trigger on chunks may have moved the stream's row.
APPEND_MANY = """
CREATE OR REPLACE FUNCTION pgstreams_append_many(
    target bigint, payloads bytea[], expected bigint, ends boolean,
    OUT next_offset bigint, OUT first_offset bigint, OUT state text, OUT reason text,
    OUT appended_at timestamp with time zone, OUT closed_at timestamp with time zone
)
LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
    place tid;
    base bigint;
BEGIN
    SELECT s.ctid, s.next_offset INTO place, base
    FROM pgstreams_stream AS s
    WHERE s.id >= target AND s.id <= target AND s.state = 'open'
      AND (expected IS NULL OR s.next_offset = expected)
    ORDER BY s.id DESC LIMIT 1 FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;

    IF cardinality(payloads) = 1 THEN
        INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
        VALUES (target, base, payloads[1], statement_timestamp())
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    ELSIF EXISTS (
        SELECT FROM pgstreams_chunk AS c WHERE c.stream_id = target AND c."offset" >= base
    ) THEN
        RETURN;
    ELSE
        INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
        SELECT target, base + data.nth - 1, data.payload, statement_timestamp()
        FROM unnest(payloads) WITH ORDINALITY AS data (payload, nth);
    END IF;

    LOOP
        UPDATE pgstreams_stream AS s
        SET next_offset = base + cardinality(payloads),
            appended_at = CASE
                WHEN cardinality(payloads) > 0 THEN statement_timestamp() ELSE s.appended_at
            END,
            state = CASE WHEN ends THEN 'completed' ELSE s.state END,
            closed_at = CASE WHEN ends THEN statement_timestamp() END
        WHERE s.ctid = place
        RETURNING s.next_offset, s.first_offset, s.state, s.reason, s.appended_at, s.closed_at
        INTO next_offset, first_offset, state, reason, appended_at, closed_at;
        EXIT WHEN FOUND;
        SELECT s.ctid INTO STRICT place FROM pgstreams_stream AS s WHERE s.id = target;
    END LOOP;
END
$function$;
"""

DROP_APPEND_MANY = "DROP FUNCTION pgstreams_append_many(bigint, bytea[], bigint, boolean)"

_LOCK_ROWS = """        locked := ARRAY(
            SELECT row.ctid
            FROM unnest(ids, expected) WITH ORDINALITY AS want (id, expected, place)
            LEFT JOIN LATERAL (
                SELECT s.ctid FROM pgstreams_stream AS s
                WHERE s.id >= want.id AND s.id <= want.id AND s.state = 'open'
                  AND (want.expected IS NULL OR s.next_offset = want.expected)
                ORDER BY s.id DESC LIMIT 1 FOR NO KEY UPDATE<skipping>
            ) AS row ON true
            ORDER BY want.place
        );"""

# Per stream, in the order of their ids: id, count of chunks, expected offset or null, and the state and
# reason to end with or null. Per chunk: payload, its stream's place from 1 on, its place in that from 0 on.
# Rows that are locked elsewhere are left out, or waited for as long as `waiting` says. The lock lets foreign
# keys to the stream pass. Returns each stream's first offset, or -1 and why not, in the order of the streams.
# No array is joined to another or searched: a kept plan is for ten elements, and a thousand squared is slow.
STORE = """
CREATE OR REPLACE FUNCTION pgstreams_store(
    writer uuid, number bigint,
    ids bigint[], counts bigint[], expected bigint[], states text[], reasons text[],
    payloads bytea[], places integer[], nths integer[],
    waiting text,
    OUT bases bigint[], OUT stored_at double precision, OUT refusals json
)
LANGUAGE plpgsql AS $function$
DECLARE
    locked tid[];
    written tid;
    place bigint;
    base bigint;
BEGIN
    IF waiting IS NULL THEN
<lock rows that are free>
    ELSE
        PERFORM set_config('lock_timeout', waiting, true);
<lock rows>
    END IF;

    bases := array_fill(-1::bigint, ARRAY[cardinality(ids)]);
    FOR place, base IN
        UPDATE pgstreams_stream AS s
        SET next_offset = s.next_offset + want.count,
            appended_at = CASE WHEN want.count > 0 THEN statement_timestamp() ELSE s.appended_at END,
            state = coalesce(want.state, s.state),
            reason = coalesce(want.reason, s.reason),
            closed_at = CASE WHEN want.state IS NOT NULL THEN statement_timestamp() END
        FROM unnest(locked, counts, states, reasons)
            WITH ORDINALITY AS want (ctid, count, state, reason, place)
        WHERE s.ctid = want.ctid
        RETURNING want.place, s.next_offset - want.count
    LOOP
        bases[place] := base;
    END LOOP;

    INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
    SELECT ids[chunk.place], bases[chunk.place] + chunk.nth, chunk.payload, statement_timestamp()
    FROM unnest(payloads, places, nths) AS chunk (payload, place, nth)
    WHERE bases[chunk.place] >= 0;

    stored_at := extract(epoch FROM statement_timestamp());
    SELECT w.ctid INTO written
    FROM pgstreams_writer AS w
    WHERE w.id >= writer AND w.id <= writer AND w.seq = number - 1
    ORDER BY w.id DESC LIMIT 1 FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'writer % is not at batch %', writer, number - 1
            USING ERRCODE = 'PGS01';
    END IF;
    UPDATE pgstreams_writer AS w
    SET seq = number, batch = number, streams = ids, bases = pgstreams_store.bases,
        used_at = statement_timestamp()
    WHERE w.ctid = written;

    IF -1 = ANY (bases) THEN
        refusals := (
            SELECT json_agg(json_build_array(
                CASE WHEN s.id IS NULL THEN 'missing'
                     WHEN s.state <> 'open' THEN 'closed'
                     WHEN s.next_offset <> want.expected THEN 'elsewhere'
                     ELSE 'locked' END,
                s.state, s.reason, s.next_offset
            ) ORDER BY want.place)
            FROM unnest(ids, expected, bases) WITH ORDINALITY AS want (id, expected, base, place)
            LEFT JOIN pgstreams_stream AS s ON s.id = want.id
            WHERE want.base < 0
        );
    END IF;
END
$function$;
""".replace("<lock rows that are free>", _LOCK_ROWS.replace("<skipping>", " SKIP LOCKED")).replace(
    "<lock rows>", _LOCK_ROWS.replace("<skipping>", "")
)

DROP_STORE = """
DROP FUNCTION pgstreams_store(
    uuid, bigint, bigint[], bigint[], bigint[], text[], text[], bytea[], integer[], integer[], text
)
"""

# One page of each of several streams, each with its stream's row. Every wanted stream has one row, in their
# order: without `stream_id` when it does not exist. `first_stored` is the first offset stored at or after the
# position, however far a hole reaches. Payloads, and their times (8 bytes each, as Postgres sends them), are
# those of the chunks that follow the position without a hole, as far as the page's bytes go, its first chunk
# at least; none where the pages before it leave no room in the bytes of all. `before` is the time of the
# chunk before the position, by which a reader knows its stream again. Offsets are gapless, so a range of them
# bounds a page. A row per stream, not per chunk: rows would be most of the cost of short chunks. The window
# hands the aggregates their input in its order.
PAGES = """
CREATE OR REPLACE FUNCTION pgstreams_pages(
    stream_ids bigint[], positions bigint[], max_chunks bigint, max_bytes bigint, max_page_bytes bigint
)
RETURNS TABLE (
    place bigint, stream_id bigint, epoch text, content_type text, state text, reason text,
    next_offset bigint, first_offset bigint, first_stored bigint,
    payloads bytea[], times bytea, before bytea, is_standby boolean
)
LANGUAGE plpgsql STABLE ROWS 50 AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT page.place, page.stream_id,
           page.epoch::text, page.content_type::text, page.state::text, page.reason::text,
           page.next_offset, page.first_offset, page.first_stored,
           CASE WHEN page.bytes_up_to_here <= greatest(page.bytes, max_bytes) THEN page.payloads END,
           CASE WHEN page.bytes_up_to_here <= greatest(page.bytes, max_bytes) THEN page.times END,
           timestamptz_send(page.before), pg_is_in_recovery()
    FROM (
        SELECT want.place, s.id AS stream_id, s.epoch, s.content_type, s.state, s.reason,
               s.next_offset, s.first_offset,
               run.before, run.first_stored, run.payloads, run.times, run.bytes,
               sum(run.bytes) OVER (ORDER BY want.place ROWS UNBOUNDED PRECEDING) AS bytes_up_to_here
        FROM unnest(stream_ids, positions)
             WITH ORDINALITY AS want (stream_id, position, place)
        LEFT JOIN LATERAL (
            SELECT id, epoch, content_type, state, reason, next_offset, first_offset
            FROM pgstreams_stream
            WHERE id >= want.stream_id AND id <= want.stream_id
            ORDER BY id DESC LIMIT 1
        ) AS s ON true
        CROSS JOIN LATERAL (
            SELECT min(c.created_at) FILTER (WHERE c."offset" < want.position) AS before,
                   coalesce(
                       min(c."offset") FILTER (WHERE c."offset" >= want.position),
                       CASE WHEN want.position < s.next_offset THEN (
                           SELECT min(beyond."offset")
                           FROM pgstreams_chunk AS beyond
                           WHERE beyond.stream_id = want.stream_id
                             AND beyond."offset" >= greatest(want.position, s.first_offset)
                             AND beyond."offset" < s.next_offset
                       ) END
                   ) AS first_stored,
                   array_agg(c.payload) FILTER (WHERE c.fits) AS payloads,
                   string_agg(timestamptz_send(c.created_at), '') FILTER (WHERE c.fits) AS times,
                   sum(octet_length(c.payload)) FILTER (WHERE c.fits) AS bytes
            FROM (
                SELECT chunk."offset", chunk.payload, chunk.created_at,
                       chunk."offset" >= want.position
                       AND chunk."offset" - row_number() OVER run
                           = least(first_value(chunk."offset") OVER run, want.position) - 1
                       AND sum(CASE WHEN chunk."offset" >= want.position THEN octet_length(chunk.payload) END)
                           OVER run - octet_length(chunk.payload) < max_page_bytes AS fits
                FROM pgstreams_chunk AS chunk
                WHERE chunk.stream_id = want.stream_id
                  AND chunk."offset" >= want.position - 1
                  AND chunk."offset" < s.next_offset
                  AND chunk."offset" < least(
                      greatest(want.position, s.first_offset), 9223372036854775807 - max_chunks
                  ) + max_chunks
                WINDOW run AS (ORDER BY chunk."offset" ROWS UNBOUNDED PRECEDING)
                ORDER BY chunk."offset"
            ) AS c
        ) AS run
    ) AS page
    ORDER BY page.place;
END
$function$;
"""

DROP_PAGES = "DROP FUNCTION pgstreams_pages(bigint[], bigint[], bigint, bigint, bigint)"
