"""A tiny ledger in Redis: the last entry of each account. It refuses a late writer by the fencing token.

A lock alone cannot: a worker may be frozen between its last look at the lock and its write. Whoever came after it has a
higher fence, and the ledger remembers the highest that it has seen.
"""

import redis

from example_project import celeryconfig


class LateWriteError(Exception):
    """Another run with a higher fence has written already."""


client = redis.Redis.from_url(celeryconfig.result_backend, decode_responses=True)
_write = client.register_script("""
    local highest = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
    if tonumber(ARGV[2]) < highest then return 0 end
    redis.call('HSET', KEYS[1], 'entry', ARGV[1], 'fence', ARGV[2])
    return 1
""")


def last_entry(account_id):
    return int(client.hget(f"ledger:{account_id}", "entry") or 0)


def write(account_id, entry, fence):
    """Write an entry; ``fence`` is None in a run without a lock."""
    if not _write([f"ledger:{account_id}"], [entry, fence or 0]):
        raise LateWriteError(f"entry {entry} of account {account_id} comes too late")
