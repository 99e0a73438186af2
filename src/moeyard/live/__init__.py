"""A page on this machine that follows a run while it runs.

state.py     what a run's folder says so far
server.py    the page and /state.json, for who has the token; orders, where they are taken
page.html    draws what it is told, once a second
"""
