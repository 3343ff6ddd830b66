"""What the application does. The locks are the ``lock_...`` options; `recorded` only writes the event log."""

import random
import time

from celery import chord

from celery_redislock import SingletonTask
from example_project import ledger
from example_project.app import app
from example_project.eventlog import call_is_sent, recorded

SKIPPED = "skipped"


def ask_upstream(seconds):
    """Stands for a slow service of somebody else."""
    time.sleep(seconds * random.uniform(0.7, 1.3))


# Users click "sync" again while it runs. Only the account counts: a full sync of it must not run beside a quick one.
# Where a call must not be skipped, it says so: sync_account.apply_async([7], {"full": True}, lock_on_conflict="retry")
@app.task(base=SingletonTask, bind=True, lock_on=["account_id"], lock_skip_result=SKIPPED)
def sync_account(self, account_id, full=False):
    with recorded(self) as run:
        entry = ledger.last_entry(account_id) + 1
        ask_upstream(1.5 if full else 0.8)
        ledger.write(account_id, entry, fence=run.fence)  # run.fence is self.lock.fence
        run.facts["entry"] = entry
    return entry


# A request must not be skipped: what has changed since the running one began is not in that one. So it comes later.
@app.task(base=SingletonTask, bind=True, lock_on_conflict="retry")
def rebuild_search_index(self):
    with recorded(self):
        time.sleep(0.6)


# Two beats send this every 3 s. A run takes 0.2 s, so its lock would be free again when the other beat's call comes:
# the key is kept for two thirds of the period. That is longer than two calls for one tick are apart (at most half the
# period), and short enough for a run that starts a little late not to shut out the next tick. Only time can tell here,
# because plain beats do not say which tick a call is for; once there is a beat scheduler that does, the option goes.
@app.task(base=SingletonTask, bind=True, lock_min_hold=2.0, lock_skip_result=SKIPPED)
def refresh_rates(self):
    with recorded(self):
        ask_upstream(0.2)


@app.task(base=SingletonTask, bind=True, lock_skip_result=SKIPPED)
def account_report(self, account_id):
    with recorded(self):
        ask_upstream(0.3)
        return [account_id, ledger.last_entry(account_id)]


@app.task(bind=True)  # a plain Celery task: its name and arguments are never the same twice
def combine_report(self, reports):
    with recorded(self):
        return dict(report for report in reports if report != SKIPPED)


def nightly_report(account_ids):
    """Send the report. The ids come from two systems, so some are there twice; a skipped member completes the chord."""
    result = chord(account_report.s(account_id) for account_id in account_ids)(combine_report.s())
    call_is_sent(combine_report.name, result.id)  # promised from now on: a chord that hangs is a lost call
    return result
