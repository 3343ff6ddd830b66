-- Set the full TTL again, only if the lease is mine. A missing key is lost: taking it again would race a release.
--
-- KEYS  1 lock
-- ARGV  1 token   2 ttl, ms
-- reply {1} renewed   {0} nobody holds it   {0, holder} somebody else does
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
    if string.sub(holder.err, 1, 9) ~= 'WRONGTYPE' then redis.call('GET', KEYS[1]) end -- raises it
    holder = ''
end
if not holder then return {0} end
if holder == ARGV[1] then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {1}
end
return {0, holder}
