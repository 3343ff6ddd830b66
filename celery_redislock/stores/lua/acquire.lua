-- Take the lock if it is free, in one round trip.
--
-- KEYS  1 lock   2 fence counter   [3 done marker of this attempt: only with lock_done_ttl]
-- ARGV  1 token  2 ttl, ms   3 ttl of the fence counter, ms   4 how tombstones of this task id begin   5 ttl of "began", ms
-- reply {1, fence}                              granted (again, if my own token is found: my reply was lost)
--       {0, holder, pttl, server time in us, m} somebody else holds it; m: 1 this attempt began once, 0 not, -1 not known
--       {2}                                     this very attempt has run to its end
--
-- The lock is written last: a command that is refused on the way (ACL, no memory) leaves no lock that nobody knows of.

-- A foreign value of another type is a holder like any other, never an error.
local function text(key)
    local value = redis.pcall('GET', key)
    if type(value) ~= 'table' then return value end
    if string.sub(value.err, 1, 9) ~= 'WRONGTYPE' then redis.call('GET', key) end -- raises it
    return ''
end

local marker = KEYS[3] and text(KEYS[3])
local holder = text(KEYS[1])
local mine = holder == ARGV[1]
if marker == 'done' and not mine then return {2} end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- a tombstone keeps other calls out, not the next attempt of the call that left it
if holder and not mine and string.sub(holder, 1, #ARGV[4]) ~= ARGV[4] then
    local began = -1
    if KEYS[3] then began = marker and 1 or 0 end
    return {0, holder, redis.call('PTTL', KEYS[1]), string.format('%.0f', now), began}
end

-- never below the clock: neither a flush nor a failover that lost a write makes it go back
local last = tonumber(text(KEYS[2]) or 0) or 0
if not (last > 0 and last < 2 ^ 53 - 1) then last = 0 end -- none yet, or not ours
local fence = string.format('%.0f', math.max(last + 1, now))
redis.call('SET', KEYS[2], fence, 'PX', ARGV[3])
if KEYS[3] then redis.call('SET', KEYS[3], 'began', 'PX', ARGV[5]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence}
