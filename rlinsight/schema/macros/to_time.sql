-- Unix nanoseconds to a UTC TIMESTAMP: to_time(start_ns).
CREATE OR REPLACE MACRO to_time(ns) AS make_timestamp(ns // 1000);
