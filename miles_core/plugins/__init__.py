"""Plugins, in the order in which a run meets them: scan, select, manifest, resolve, plan, load, bind.

Nothing here imports a plugin before `load`; a plan is made from static manifests alone.
"""
