import logging
def test_probe(app, worker, redis, heard, make_app):
    from celery_redislock import SingletonTask
    from celery_redislock.runtime import Runtime
    from celery import current_app
    seen=[]
    @app.task(base=SingletonTask, bind=True)
    def t(self, x, y=2):
        seen.append((self.request.id, self.lock.key, list(redis.keys())))
        return x
    r = t.delay(1)
    req = worker.run()
    assert r.get()==1
    print(seen, req, heard, worker.acknowledged)
    r = t.apply((1,), lock_ttl=5)
    print(r.state, r.result)
    print(app.conf.get("redislock_url"))
    try: print(Runtime.of(current_app))
    except Exception as e: print(repr(e))
    r = t.map([1,2]).apply_async(); print(worker.waiting()); 
    try:
        worker.run()
        print(r.state, r.result)
    except Exception as e: print(repr(e))
    assert 0
