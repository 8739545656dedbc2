\set number :number + 1
SELECT pgstreams_append(
    'seed/' || :client_id,
    convert_to(
        format('{"client": %s, "number": %s, "text": "a token"}', :client_id::int, :number::int), 'UTF8'
    )
);
