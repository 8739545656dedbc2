"""`pgstreams_store(…)`: how a `StreamWriter` stores a batch; no other program should call it.

A function, so that the server keeps the plans of its four statements, also behind a pooler: as one statement
of the client's, a batch of fifty takes twice as long.
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations._operations import OnPostgres, pin_search_path

# Per stream, in the order of their ids: id, count of chunks, expected offset or null, and the state and
# reason to end with or null. Per chunk: payload, its stream's place from 1 on, its place in that from 0 on.
# Rows that are locked elsewhere are left out, or waited for as long as `waiting` says. The lock lets foreign
# keys to the stream pass. Returns each stream's first offset, or -1 and why not, in the order of the streams.
# No array is joined to another or searched: a kept plan is for ten elements, and a thousand squared is slow.
STORE_FUNCTION = """
CREATE FUNCTION pgstreams_store(
    writer uuid, number bigint,
    ids bigint[], counts bigint[], expected bigint[], states text[], reasons text[],
    payloads bytea[], places integer[], nths integer[],
    waiting text,
    OUT bases bigint[], OUT stored_at double precision, OUT refusals json
)
LANGUAGE plpgsql AS $function$
DECLARE
    locked bigint[];
    all_locked boolean;
    place bigint;
    base bigint;
BEGIN
    IF waiting IS NULL THEN
        locked := ARRAY(
            SELECT s.id FROM pgstreams_stream AS s WHERE s.id = ANY (ids)
            ORDER BY s.id FOR NO KEY UPDATE SKIP LOCKED
        );
    ELSE
        PERFORM set_config('lock_timeout', waiting, true);
        locked := ARRAY(
            SELECT s.id FROM pgstreams_stream AS s WHERE s.id = ANY (ids)
            ORDER BY s.id FOR NO KEY UPDATE
        );
    END IF;

    all_locked := cardinality(locked) = cardinality(ids);
    bases := array_fill(-1::bigint, ARRAY[cardinality(ids)]);
    FOR place, base IN
        UPDATE pgstreams_stream AS s
        SET next_offset = s.next_offset + want.count,
            appended_at = CASE WHEN want.count > 0 THEN statement_timestamp() ELSE s.appended_at END,
            state = coalesce(want.state, s.state),
            reason = coalesce(want.reason, s.reason),
            closed_at = CASE WHEN want.state IS NOT NULL THEN statement_timestamp() END
        FROM unnest(ids, counts, expected, states, reasons)
            WITH ORDINALITY AS want (id, count, expected, state, reason, place)
        WHERE s.id = want.id
          AND (all_locked OR s.id = ANY (locked))
          AND s.state = 'open'
          AND (want.expected IS NULL OR s.next_offset = want.expected)
        RETURNING want.place, s.next_offset - want.count
    LOOP
        bases[place] := base;
    END LOOP;

    INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
    SELECT ids[chunk.place], bases[chunk.place] + chunk.nth, chunk.payload, statement_timestamp()
    FROM unnest(payloads, places, nths) AS chunk (payload, place, nth)
    WHERE bases[chunk.place] >= 0;

    stored_at := extract(epoch FROM statement_timestamp());
    UPDATE pgstreams_writer AS w
    SET seq = number, batch = number, streams = ids, bases = pgstreams_store.bases,
        used_at = statement_timestamp()
    WHERE w.id = writer AND w.seq = number - 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'writer % is not at batch %', writer, number - 1
            USING ERRCODE = 'PGS01';
    END IF;

    IF -1 = ANY (bases) THEN
        refusals := (
            SELECT json_agg(json_build_array(
                CASE WHEN s.id IS NULL THEN 'missing'
                     WHEN s.id <> ALL (locked) THEN 'locked'
                     WHEN s.state <> 'open' THEN 'closed'
                     ELSE 'elsewhere' END,
                s.state, s.reason, s.next_offset
            ) ORDER BY want.place)
            FROM unnest(ids, bases) WITH ORDINALITY AS want (id, base, place)
            LEFT JOIN pgstreams_stream AS s ON s.id = want.id
            WHERE want.base < 0
        );
    END IF;
END
$function$;
"""

DROP_STORE_FUNCTION = """
DROP FUNCTION pgstreams_store(
    uuid, bigint, bigint[], bigint[], bigint[], text[], text[], bytea[], integer[], integer[], text
)
"""


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0003_append_function")]

    operations = [
        OnPostgres(
            database_operations=[
                migrations.RunSQL(STORE_FUNCTION, DROP_STORE_FUNCTION),
                pin_search_path("pgstreams_store"),
            ]
        )
    ]
