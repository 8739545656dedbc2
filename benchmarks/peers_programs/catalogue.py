"""Who is compared, how each is set up, and what it promises when a write is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One row of the comparison."""

    name: str
    module: str
    """The module of this package that writes to it and reads from it."""
    packages: tuple[str, ...]
    """What it is on PyPI; the first is the peer."""
    document: str
    """The documentation that it is set up by."""
    writer: str
    """What a writer is: the concurrency that the peer offers and that is best for it."""
    on_disk: str
    """What is on disk when a write is acknowledged."""
    durable: bool
    """Whether all that is acknowledged is on disk."""
    stores: str
    announces: bool
    resumes: str
    order: str
    strength: str = ""
    """What it owes it to where it is ahead of this project."""
    in_flight: int = 1
    """How many appends a writer waits for at once."""
    processes: int = 1
    """The writers are spread over so many processes."""
    options: dict[str, Any] = field(default_factory=dict)
    """The module's own settings for this peer."""
    redis: tuple[str, ...] | None = None
    """Options of its redis-server; None when it needs none."""
    django: bool = False
    """Whether it lives in a Django project."""
    server: str | None = None
    """The module that serves its readers, if they are clients of a server."""
    ours: bool = False


FLUSHED = "the write, committed and flushed"
IN_MEMORY = "it keeps what it serves in memory, and sends an entry itself to whoever waits for it"

SEVERAL = 10

SINGLE = (
    Peer(
        name="django-pgstreams StreamWriter",
        module="pgstreams_writer",
        packages=("django-pgstreams",),
        document="README.md",
        writer="a task; all share one process's writer",
        on_disk=FLUSHED,
        durable=True,
        stores="yes",
        announces=True,
        resumes="by offset",
        order="per stream, gapless",
        django=True,
        ours=True,
    ),
    Peer(
        name="django-pgstreams ORM",
        module="pgstreams_orm",
        packages=("django-pgstreams",),
        document="README.md",
        writer="a thread with Django's connection",
        on_disk=FLUSHED,
        durable=True,
        stores="yes",
        announces=True,
        resumes="by offset",
        order="per stream, gapless",
        django=True,
        ours=True,
    ),
    Peer(
        name="Redis Streams, AOF always",
        module="redis_streams",
        packages=("redis", "hiredis"),
        document="redis.io: Redis Streams, Redis persistence; redis-py's README (asyncio, hiredis)",
        writer="a task with its connection",
        on_disk="the write, flushed",
        durable=True,
        stores="yes",
        announces=True,
        resumes="by entry id",
        order="per stream",
        strength=IN_MEMORY,
        redis=("--appendonly", "yes", "--appendfsync", "always"),
    ),
    Peer(
        name="Redis Streams, AOF everysec",
        module="redis_streams",
        packages=("redis", "hiredis"),
        document="redis.io: Redis Streams, Redis persistence; redis-py's README (asyncio, hiredis)",
        writer="a task with its connection",
        on_disk="nothing, for up to a second",
        durable=False,
        stores="yes",
        announces=True,
        resumes="by entry id",
        order="per stream",
        strength=IN_MEMORY,
        redis=("--appendonly", "yes", "--appendfsync", "everysec"),
    ),
    Peer(
        name="dbos streams",
        module="dbos_streams",
        packages=("dbos",),
        document="docs.dbos.dev, Python: Communicating with Workflows, DBOS Client, Configuration",
        writer="a workflow, whose step writes in a thread of its own",
        on_disk=FLUSHED,
        durable=True,
        stores="yes",
        announces=True,
        resumes="by offset",
        order="per stream, gapless",
        strength="a reader queries its own stream alone",
    ),
    Peer(
        name="rakaia-streams Django store",
        module="rakaia_store",
        packages=("rakaia-streams", "channels-redis", "hypercorn"),
        document="its docs: Django Integration, Deployment (durable store, Redis channel layer, hypercorn)",
        writer="a thread with Django's connection, over two processes",
        on_disk=FLUSHED,
        durable=True,
        stores="yes",
        announces=True,
        resumes="by offset",
        order="per stream, gapless",
        strength="the channel layer carries the event itself",
        processes=2,
        options={
            "layer": "channels_redis.core.RedisChannelLayer",
            "apps": ["daphne", "channels", "django_rakaia"],
            "urls": "benchmarks.peers_programs.rakaia_urls",
        },
        redis=(),
        django=True,
        server="rakaia_server",
    ),
    Peer(
        name="channels_postgres groups",
        module="channels_groups",
        packages=("channels-postgres",),
        document="its README",
        writer="a task; a pool of connections",
        on_disk=FLUSHED,
        durable=True,
        stores="for a minute",
        announces=True,
        resumes="no",
        order="not promised",
        strength="its notification carries the message itself, so that no query follows",
        options={
            "layer": "channels_postgres.core.PostgresChannelLayer",
            "apps": ["channels", "channels_postgres"],
        },
        django=True,
    ),
    Peer(
        name="channels_redis groups",
        module="channels_groups",
        packages=("channels-redis",),
        document="its README: RedisChannelLayer",
        writer="a task",
        on_disk="nothing",
        durable=False,
        stores="100 in memory",
        announces=True,
        resumes="no",
        order="not promised",
        strength="it stores nothing for longer than it takes to deliver",
        options={"layer": "channels_redis.core.RedisChannelLayer", "apps": ["channels"]},
        redis=(),
        django=True,
    ),
    Peer(
        name="channels_redis groups, Pub/Sub",
        module="channels_groups",
        packages=("channels-redis",),
        document="its README: RedisPubSubChannelLayer",
        writer="a task, over two processes",
        on_disk="nothing",
        durable=False,
        stores="no",
        announces=True,
        resumes="no",
        order="not promised",
        strength="it stores nothing: a message passes through",
        processes=2,
        options={"layer": "channels_redis.pubsub.RedisPubSubChannelLayer", "apps": ["channels"]},
        redis=(),
        django=True,
    ),
)

# The same with several appends of a writer in flight, of those whose interface has that.
PEERS = SINGLE + tuple(
    replace(
        peer, name=f"{peer.name}, {SEVERAL} in flight", writer=f"{peer.writer}; {means}", in_flight=SEVERAL
    )
    for peer, means in (
        (SINGLE[0], "tasks of it, gathered"),
        (SINGLE[2], "a pipeline"),
        (SINGLE[3], "a pipeline"),
    )
)
