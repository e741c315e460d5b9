-- Wall clock in unix nanoseconds, comparable to every *_ns column: now_ns() - start_ns.
CREATE OR REPLACE MACRO now_ns() AS epoch_us(now()) * 1000;
