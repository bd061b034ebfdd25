"""All rows, in the order of the table."""

from tests.torture import damage, engines, faults, fuzz, hostile, identity, kills, sharing, simulation
from tests.torture.base import Row

ROWS = (
    Row("kill", "kill -9 of two processes that store into one directory", 1000, kills.random_moments),
    Row("kill-steps", "kill -9 at a step of publishing", 100, kills.publish_steps, len(kills.STEPS)),
    Row("flips", "bit flips in headers and data", 18_000, damage.record_bits),
    Row("journal-flips", "bit flips in the journal", 2000, damage.journal_bits),
    Row("torn", "torn and stale writes at every 512 B of a record", 2000, damage.torn_records),
    Row("headers", "malformed record headers", 60_000, fuzz.headers),
    Row("journals", "malformed journals", 20_000, fuzz.journals),
    Row("replies", "malformed replies of a Redis server", 30_000, fuzz.replies),
    Row(
        "faults", "ENOSPC, EIO, short write at each of the first 20 system calls", 240, faults.disk_faults, 24
    ),
    Row(
        "same-files",
        "two processes store the same blocks into one directory",
        10_000,
        sharing.same_blocks_in_files,
    ),
    Row(
        "same-redis",
        "two processes store the same blocks on one Redis server",
        10_000,
        sharing.same_blocks_on_redis,
    ),
    Row("fork", "forked users, half of them of their parent's tiers", 500, sharing.forked_users),
    Row("spawn", "spawned users", 500, sharing.spawned_users),
    Row("cancelled", "requests, half of them cancelled", 5000, engines.cancelled),
    Row("sigterm", "SIGTERM during store", 50, engines.terminated),
    Row("load", "seconds of twice the load", 60, engines.load),
    Row("hostile", "hostile names and links in the directory", 500, hostile.names_and_links),
    Row("fields", "each identity field changed alone", 1, identity.fields_alone),
    Row("tuples", "random sets of identity fields", 50_000, identity.random_tuples),
    Row("simulation", "seeds of the simulated store", 20_000, simulation.seeds),
)
