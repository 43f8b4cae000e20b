"""Pipeline schedules as plain data: steps, tables, and what can be done with a table. Pure Python."""
