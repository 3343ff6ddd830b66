"""A small application that uses celery-redislock; README.md beside this file says where to look first."""
