"""Does the installed package hold what the repository does? Run by `make build`, outside the source tree."""

from importlib.metadata import version
from importlib.resources import files

import celery_redislock

root = files(celery_redislock)
assert "site-packages" in str(root), f"not the installed package: {root}"
assert (root / "py.typed").is_file(), "py.typed is missing: no types for users"
scripts = sorted(f.name for f in (root / "stores" / "lua").iterdir() if f.name.endswith(".lua"))
assert {"acquire.lua", "release.lua", "renew.lua"} <= set(scripts), f"Lua scripts are missing: {scripts}"
for name in celery_redislock.__all__:
    getattr(celery_redislock, name)
print(f"celery-redislock {version('celery-redislock')}: {celery_redislock.__all__}, {scripts}")
