"""A database backend whose Postgres comes from PyPI and runs while somebody uses it.

`base` is the Django backend, `server` the way in without Django, `keeper` the process that
starts and stops Postgres. `server` says which locks hold all that together.
"""
