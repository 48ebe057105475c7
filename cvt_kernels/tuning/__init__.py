"""Tuning on request: which backend is the fastest correct one on this machine.

``choose`` reads the file of ``choices``; nothing else here runs in a user's calls.
"""
