"""The impatient users: sends duplicate calls for some seconds. ``python -m example_project.load 15``"""

import random
import sys
import time

from example_project import eventlog
from example_project.tasks import nightly_report, rebuild_search_index, sync_account

ACCOUNTS = [1, 2, 3, 4]


def click_wildly(seconds):
    """Every quarter of a second somebody clicks "sync" a few times; now and then, the rest."""
    began = time.monotonic()
    reports = rebuilds = 0
    while (passed := time.monotonic() - began) < seconds:
        account_id = random.choice(ACCOUNTS)
        for _click in range(random.randint(2, 7)):
            sync_account.delay(account_id)
        if passed >= 1 + 5 * rebuilds:
            rebuilds += 1
            for _deployment in range(3):
                rebuild_search_index.delay()
            sync_account.apply_async([account_id], {"full": True}, lock_on_conflict="retry")
        if passed >= 0.5 + 4 * reports:
            reports += 1
            nightly_report([*ACCOUNTS, *ACCOUNTS[:2]])
        time.sleep(0.25)


if __name__ == "__main__":
    click_wildly(float(sys.argv[1]))
    eventlog.write("closing")
