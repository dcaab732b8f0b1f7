"""The last import of the fork server of `miles_testing.forked`: what it can do once, so that no fork has to."""

import gc

import pydantic

pydantic.TypeAdapter(int)  # the first one reads what every installed distribution says of pydantic plugins
gc.collect()
gc.freeze()  # a fork that collects garbage need not go through all that is imported, which copies its pages as well
