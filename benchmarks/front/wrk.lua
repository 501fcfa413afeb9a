-- For wrk: posts each of the bodies in a file, one a line, once, and ends when all answers are there, whole.
-- Arguments: the file; how many events an answer has before [DONE]; how many connections there are; over how
-- many ms they spread their first requests; for how many ms at most each then pauses before the next one.
local ffi = require("ffi")
ffi.cdef("int getpid(void); int kill(int pid, int signal);")
local SIGINT, FOREVER_MS = 2, 3600 * 1000
local bodies, num_events, num_connections, spread_ms, max_pause_ms = {}, nil, nil, nil, nil
local num_asked, num_due = 0, 0
num_whole = 0 -- a global: `done` runs in another state than the rest, and asks the only thread for it
local only_thread

function setup(thread)
   only_thread = thread
end

function init(arguments)
   for line in io.lines(arguments[1]) do
      bodies[#bodies + 1] = line
   end
   num_events, num_connections = tonumber(arguments[2]), tonumber(arguments[3])
   spread_ms, max_pause_ms = tonumber(arguments[4]), tonumber(arguments[5])
   wrk.headers["Content-Type"] = "application/json"
end

function delay()
   num_due = num_due + 1
   if num_due > #bodies then
      return FOREVER_MS
   end
   if num_due <= num_connections then
      return num_due * spread_ms / num_connections
   end
   return math.random(0, max_pause_ms)
end

function request()
   num_asked = num_asked + 1 -- once before anything is due, on trial: so the first one is sent as the last
   return wrk.format("POST", "/v1/completions", nil, bodies[num_asked % #bodies + 1])
end

local function stop()
   ffi.C.kill(ffi.C.getpid(), SIGINT) -- else it goes on for as long as it was told to
end

function response(status, headers, body)
   local _, num_found = body:gsub("data: ", "")
   if status ~= 200 or num_found ~= num_events + 1 or body:sub(-14) ~= "data: [DONE]\n\n" then
      io.stderr:write(status, ", ", num_found, " events: ", body:sub(-300), "\n")
      stop()
      return
   end
   num_whole = num_whole + 1
   if num_whole == #bodies then
      stop()
   end
end

function done(summary, latency)
   local errors = summary.errors
   local num_errors = errors.connect + errors.read + errors.write + errors.status + errors.timeout
   io.write(string.format("\n%d %d %d", only_thread:get("num_whole"), num_errors, summary.bytes))
   for index = 1, #latency do
      local time_us, number = latency(index)
      io.write(string.rep(string.format(" %d", time_us), number))
   end
   io.write("\n")
end
