"""`pgstreams_append(key, payload)`: an append for `psql` and for programs in other languages.

It does what `Stream.append` does, checks of the payload included, in the caller's transaction and with the
caller's rights, and returns the offset. The relay announces it (`manage.py pgstreams relay`).
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations._operations import OnPostgres, pin_search_path

# The offset comes from the stream's row, under its lock, so only a row that something else stored can be in
# the way: the counter is raised past it. JSON is cast to json, as jsonb refuses "\u0000"; since json lets
# halves of surrogate pairs pass, they are looked for. Text may hold NUL, which Postgres's own text may not:
# another character takes its place for the check.
APPEND_FUNCTION = r"""
CREATE FUNCTION pgstreams_append(key text, payload bytea) RETURNS bigint
LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
    taken_id bigint;
    taken_offset bigint;
    taken_at timestamp with time zone;
    content_type text;
    state text;
    reason text;
    body text;
    parsed json;
BEGIN
    FOR attempt IN 1..3 LOOP
        UPDATE pgstreams_stream AS s
        SET next_offset = s.next_offset + 1, appended_at = statement_timestamp()
        WHERE s.key = pgstreams_append.key AND s.state = 'open'
        RETURNING s.id, s.next_offset - 1, s.appended_at, s.content_type
        INTO taken_id, taken_offset, taken_at, content_type;
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
        VALUES (taken_id, taken_offset, pgstreams_append.payload, taken_at)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN taken_offset;
        END IF;
        UPDATE pgstreams_stream AS s
        SET next_offset = (SELECT max(c."offset") + 1 FROM pgstreams_chunk AS c WHERE c.stream_id = s.id)
        WHERE s.id = taken_id;
    END LOOP;
    RAISE EXCEPTION 'stream % keeps getting chunks that do not advance its counter', quote_literal(key)
        USING ERRCODE = 'lock_not_available',
              HINT = 'Another program inserts rows into pgstreams_chunk: let it call pgstreams_append.';
END
$function$;
"""

DROP_APPEND_FUNCTION = "DROP FUNCTION pgstreams_append(text, bytea)"


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0002_writer")]

    operations = [
        OnPostgres(
            database_operations=[
                migrations.RunSQL(APPEND_FUNCTION, DROP_APPEND_FUNCTION),
                pin_search_path("pgstreams_append"),
            ]
        )
    ]
