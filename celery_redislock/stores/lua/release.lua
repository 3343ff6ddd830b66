-- Give up a lease, only if it is mine.
--
-- KEYS  1 lock   [2 done marker: only if the attempt has run to its end and lock_done_ttl is set]
-- ARGV  1 token  2 how long the key stays, ms (0: it goes)   3 tombstone that stays   4 ttl of the done marker, ms
-- reply {1} it was mine (or I have released it before)   {0} nobody holds it   {0, holder} somebody else does
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
    if string.sub(holder.err, 1, 9) ~= 'WRONGTYPE' then redis.call('GET', KEYS[1]) end -- raises it
    holder = ''
end

local reply
if not holder then
    reply = {0}
elseif holder == ARGV[1] then
    if tonumber(ARGV[2]) > 0 then
        redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[2])
    else
        redis.call('DEL', KEYS[1])
    end
    reply = {1}
elseif ARGV[3] ~= '' and holder == ARGV[3] then
    reply = {1}
else
    reply = {0, holder}
end

-- last, and allowed to fail (no memory): a late copy that runs again is better than a lock that nobody frees
if KEYS[2] then redis.pcall('SET', KEYS[2], 'done', 'PX', ARGV[4]) end
return reply
